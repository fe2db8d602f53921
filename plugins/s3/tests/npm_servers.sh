#!/usr/bin/env bash
# Run the conformance kit on servers that npm installs: s3rver (S3) and Azurite
# (Azure). They keep what is stored in a folder that goes with them.
#
# Usage: PYTHON=.venv/bin/python npm_servers.sh [s3rver|azurite ...]
set -euo pipefail
PYTHON=$(realpath -s "${PYTHON:-python}")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
KVDOCK=$(dirname "$PYTHON")/kvdock
SERVERS=("$@")
[ ${#SERVERS[@]} -gt 0 ] || SERVERS=(s3rver azurite)
command -v npm >/dev/null || { echo "npm is not installed" >&2; exit 2; }

work=$(mktemp -d)
pid=
finish() {
  if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
  rm -rf "$work"
}
trap finish EXIT
cd "$work"
npm install --silent --no-audit --no-fund "${SERVERS[@]}" >/dev/null

port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
answers() {
  "$PYTHON" - "$1" <<'PY'
import socket, sys, time
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1).close()
        sys.exit(0)
    except OSError:
        time.sleep(0.1)
sys.exit("the server does not start")
PY
}

for server in "${SERVERS[@]}"; do
  at=$(port)
  case "$server" in
    s3rver)
      node_modules/.bin/s3rver -a 127.0.0.1 -p "$at" -d "$work/s3rver" \
        --configure-bucket kvdock >/dev/null 2>&1 &
      pid=$!
      answers "$at"
      # It ignores the condition of a put.
      settings=(--set url=s3://kvdock/kit --set "endpoint=http://127.0.0.1:$at"
        --set access_key_id=S3RVER --set secret_access_key=S3RVER
        --set region=us-east-1 --set conditional_put=false)
      ;;
    azurite)
      node_modules/.bin/azurite-blob --inMemoryPersistence --skipApiVersionCheck \
        --blobHost 127.0.0.1 --blobPort "$at" >/dev/null 2>&1 &
      pid=$!
      answers "$at"
      # The account that every emulator of Azure has.
      export AZURE_STORAGE_ACCOUNT_NAME=devstoreaccount1
      export AZURE_STORAGE_ACCOUNT_KEY=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==
      "$PYTHON" "$here/azure_container.py" "$at" kvdock
      settings=(--set url=az://kvdock/kit
        --set "endpoint=http://127.0.0.1:$at/devstoreaccount1")
      ;;
    *)
      echo "no such server: $server" >&2
      exit 2
      ;;
  esac
  echo "== kvdock check s3 on $server"
  # They are slower than a local store, and a busy machine makes them slower still.
  "$KVDOCK" check s3 --scale 5 "${settings[@]}"
  kill "$pid"
  wait "$pid" 2>/dev/null || true
  pid=
done
