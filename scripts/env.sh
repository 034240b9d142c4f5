#!/usr/bin/env bash
# Runs a command with a model cache that can be written: the user's own, or the clone's .cache where that is read-only.
set -euo pipefail

cache="${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}"
if ! mkdir -p "$cache/ropeway" 2>/dev/null || [ ! -w "$cache/ropeway" ]; then
  export XDG_CACHE_HOME="$PWD/.cache"
  export PIP_NO_CACHE_DIR=1
  echo "note: $cache is not writable, so models are cached in $XDG_CACHE_HOME" >&2
fi
exec "$@"
