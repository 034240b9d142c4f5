#!/usr/bin/env bash
# Builds the native module with the address and undefined-behaviour sanitizers, into build/sanitize, and runs the tests
# of native code under it; arguments go to pytest. The build in use stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${SANITIZE_PYTHON:-$PWD/.venv/bin/python}"
PATH="$(dirname "$python"):$PATH"
cmake -S . -B build/sanitize -G Ninja -DPython_EXECUTABLE="$python" -DROPEWAY_SANITIZE=address,undefined -DROPEWAY_COMPILE_CORE=OFF >build/sanitize.log ||
  { cat build/sanitize.log; exit 1; }
cmake --build build/sanitize

# A copy of the package beside this module. -S: an editable install would lead to the other one.
rm -rf build/sanitize/package
mkdir -p build/sanitize/package
cp -r src/ropeway build/sanitize/package/
rm -f build/sanitize/package/ropeway/_native*.so
cp build/sanitize/_native*.so build/sanitize/package/ropeway/
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')

# What is found is written to the process's stderr, which pytest would otherwise keep (--capture=sys) and lose with it.
# The interpreter's own allocator would hide the ends of its blocks, and what it keeps to the end is no leak of ours.
compiler="${CXX:-g++}"
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/differential/test_gemm.py tests/differential/test_native.py
  tests/differential/test_steps.py tests/differential/test_invariance.py tests/differential/test_copy_blocks.py
  tests/differential/test_sampler.py)
exec env LD_PRELOAD="$("$compiler" -print-file-name=libasan.so):$("$compiler" -print-file-name=libubsan.so)" \
  ROPEWAY_INTERPRET_CORE=1 PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  PYTHONPATH="$PWD/build/sanitize/package:$site" \
  "$python" -S -m pytest --capture=sys -p no:cacheprovider --timeout 1800 "${tests[@]}"
