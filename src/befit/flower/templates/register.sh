#!/usr/bin/env bash
# Lets every site in whose public key is here, on the server, once the SuperLink runs. Those known already stay so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PATH=@bin@:$PATH
export FLWR_HOME=$PWD/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
for key in ../sites/*/keys/site.pub; do
  flwr supernode register "$key" befit || echo "$key: see above" >&2
done
