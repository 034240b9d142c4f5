#!/usr/bin/env bash
# Sets up a clone: setup.sh run|dev [build]
#   1/4 environment   .venv with Python packages (`dev` adds what tests and checks need)
#   2/4 build         the native module, installed into .venv
#   3/4 model         the default model, into the user's cache (left out after `build`)
# Safe to run twice at once and again after an interruption; a step whose inputs did not change is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

kind="$1"
last="${2:-model}"
python="${PYTHON:-python3}"
apt="sudo apt-get update && sudo apt-get install -y g++ make python3-dev python3-venv"

fail() {
  echo "error: $1" >&2
  echo "remedy: $2" >&2
  exit 1
}

check_tools() {
  command -v "$python" >/dev/null || fail "no $python found" "$apt"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: Ropeway needs Python 3.11 or newer" "set PYTHON=/path/to/python3.11 (or newer) and run again"
  "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module" "$apt"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    fail "the C headers of $python are missing" "$apt"
  local compiler="${CXX:-g++}" version
  command -v "$compiler" >/dev/null || fail "no C++ compiler ($compiler) found" "$apt"
  version=$("$compiler" -dumpversion)
  if [[ "$("$compiler" --version)" != *clang* ]] && [ "${version%%.*}" -lt 12 ]; then
    fail "$compiler $version is too old: Ropeway needs g++ 12 or newer" "sudo apt-get install -y g++-12, then run again with CXX=g++-12"
  fi
}

# The scheduler compiles to C: by the compiler that belongs to the chosen one, where that is there.
if [ -n "${CXX:-}" ] && [ -z "${CC:-}" ]; then
  cxx_name="${CXX##*/}"
  c_name="${cxx_name/clang++/clang}"
  c_compiler="${CXX%"$cxx_name"}${c_name/g++/gcc}"
  if [ "$c_compiler" != "$CXX" ] && command -v "$c_compiler" >/dev/null; then export CC="$c_compiler"; fi
fi

# One set-up at a time: a second one waits here, then finds the work done.
mkdir -p build
exec 9>build/setup.lock
flock 9

digest() { cat "$@" | sha256sum | cut -c1-16; }
environment="$PWD $("$python" -c 'import sys; print(sys.version, sys.prefix)' 2>/dev/null || true) $(digest pyproject.toml)"
built_from() {
  find native CMakeLists.txt -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt
  find src/ropeway/core src/ropeway/errors.py src/ropeway/_core_digest.py scripts/compile_core.py -name '*.py'
}
sources="$environment $(built_from | LC_ALL=C sort | tr '\n' '\0' | xargs -0 sha256sum | sha256sum | cut -c1-16)"

stamped() { [ -f ".venv/$1.stamp" ] && [ "$(cat ".venv/$1.stamp")" = "$2" ]; }
stamp() { printf '%s' "$2" >".venv/$1.stamp"; }
pip() { scripts/env.sh .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

echo "1/4 environment"
# What `dev` installs covers `run`.
if ! stamped environment-dev "$environment" && ! stamped "environment-$kind" "$environment"; then
  check_tools
  if ! stamped where "$PWD"; then # a moved clone: neither a venv nor a build directory survives that
    find build -mindepth 1 ! -name setup.lock -delete
    "$python" -m venv --clear .venv
    stamp where "$PWD"
  fi
  .venv/bin/python scripts/requirements.py "$kind" >build/requirements.txt
  echo "    installing $(wc -l <build/requirements.txt) packages and what they need into .venv (about a minute)"
  pip install -r build/requirements.txt ||
    fail "pip could not install the packages listed in build/requirements.txt" "check the network or PIP_INDEX_URL, then run again"
  stamp "environment-$kind" "$environment"
fi

echo "2/4 build"
if ! stamped build "$sources"; then
  check_tools
  echo "    compiling the native module and the scheduler (about a minute)"
  pip install --no-deps --no-build-isolation --config-settings=build-dir=build/cmake --editable . ||
    fail "the native module or the scheduler did not build" "read the compiler's message above; $apt"
  stamp build "$sources"
fi
[ "$last" = build ] && exit 0

echo "3/4 model"
scripts/env.sh .venv/bin/ropeway models fetch
