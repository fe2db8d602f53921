#!/usr/bin/env bash
# Run the conformance kit on three of SGLang's own storage classes, and print the rows
# of the table in docs/how-to/hicache.md: what passed, what failed, what was not tried.
#
# Usage: PYTHON=.venv-sglang/bin/python classes.sh [file|nixl|shm ...]
#
# PYTHON has SGLang, kvdock-hicache and kvdock-cli. Pages lie in a folder that goes with
# them. NIXL's cleaner is off: it deletes pages where the file system is 80 % full.
set -euo pipefail
PYTHON=$(realpath -s "${PYTHON:-python}")
KVDOCK=$(dirname "$PYTHON")/kvdock
CLASSES=("$@")
[ ${#CLASSES[@]} -gt 0 ] || CLASSES=(file nixl shm)
storage=sglang.srt.mem_cache.storage
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SGLANG_USE_CPU_ENGINE=1
export SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR=$work/nixl SGLANG_HICACHE_NIXL_USE_DIRECT_IO=0

for class in "${CLASSES[@]}"; do
  only=()
  case $class in
    file)
      path=sglang.srt.mem_cache.hicache_storage:HiCacheFile
      options='{"file_storage_path": "'$work'/file"}' ;;
    nixl)
      # A wheel without code of its own that chooses between builds for CUDA 12 and 13.
      "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$work/wheel" nixl==1.5.1
      export PYTHONPATH=$work/wheel
      path=$storage.nixl.hicache_nixl:HiCacheNixl
      options='{"plugin": {"posix": {"active": true}}, "l3_cleaner_enabled": false}' ;;
    shm)
      path=$storage.shm.hicache_shm:HiCacheShm options='{}' only=(--only put_can_be_found) ;;
  esac
  "$KVDOCK" check hicache --json "${only[@]}" --set "storage_class=$path" \
    --set "extra_config=$options" >"$work/found.json" 2>"$work/log" || true
  "$PYTHON" - "$path" "$work/found.json" <<'PY' || { tail -n 20 "$work/log" >&2; exit 1; }
import json, sys
found = json.loads(open(sys.argv[2]).read().splitlines()[-1])
counts = [str(found["counts"][one]) for one in ("passed", "failed", "skipped")]
print("|", " | ".join([f"`{sys.argv[1].partition(':')[2]}`", *counts]), "|")
PY
done
