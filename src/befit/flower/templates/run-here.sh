#!/usr/bin/env bash
# @name@ on this machine alone: SuperLink, and for each site worker, SuperNode and executor, over loopback with TLS; then
# the run, and the end of all of them, as on Ctrl-C. Each process writes here/logs/NAME.log. Arguments go to flwr run, such
# as --run-config resume=true after an interruption. In another terminal meanwhile: run-here.sh stop SITE, and start SITE.
set -euo pipefail
umask 077
cd "$(dirname "${BASH_SOURCE[0]}")"
PATH=@bin@:$PATH
export FLWR_HOME=$PWD/server/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
root=$PWD runs=@runs@ logs=$PWD/here/logs
declare -A started=()  # what has to go on, by name: its process, which leads a group
groups=()              # all that was started

say() { printf '%s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }
alive() { kill -0 "$1" 2>/dev/null; }
is_open() { (: <>"/dev/tcp/${2-127.0.0.1}/$1") 2>/dev/null; }  # PORT [ADDRESS]

start() {  # NAME COMMAND...: in the background, as a process group of its own
  local name=$1
  shift
  : >>"$logs/$name.log"  # here and not in the background, as others read it at once
  set -m
  "$@" >>"$logs/$name.log" 2>&1 </dev/null &
  started[$name]=$!
  groups+=("$!")
  disown  # or bash would tell of every process that a signal ends
  set +m
}

start_worker() {  # SITE
  cd "sites/$1"
  start "worker-$1" befit worker site.yaml
  cd "$root"
}

start_node() {  # SITE PORT: with an executor, for Flower's own process for a message can be too slow on a busy machine
  local secret=$root/here/$1.secret
  head -c 32 /dev/urandom >"$secret"
  cd "sites/$1"
  start "executor-$1" befit flower executor --node "127.0.0.1:$2" --secret "$secret"
  start "supernode-$1" flower-supernode --superlink @near@:@port@ --root-certificates ca.crt \
    --auth-supernode-private-key keys/site.key --host 127.0.0.1 --port "$2" --node-config "site=\"$PWD/site.yaml\"" \
    --isolation process --superexec-auth-secret-file "$secret"
  cd "$root"
}

stop() {  # GROUP...
  local group signal
  for signal in TERM KILL; do
    for group; do kill "-$signal" -- "-$group" 2>/dev/null || true; done
    for _ in {1..100}; do
      for group; do kill -0 -- "-$group" 2>/dev/null && sleep 0.1 && continue 2; done
      return 0
    done
  done
}

check() {  # whether all that was started is still there
  local name
  for name in "${!started[@]}"; do
    alive "${started[$name]}" || { tail -n 15 "$logs/$name.log" >&2; fail "$name has ended; see $logs/$name.log"; }
  done
}

until_true() {  # COMMAND...: wait for it, as long as all that was started is there
  until "$@"; do
    check
    sleep 0.2
  done
}

obey() {  # stop and start single sites, as another call of this script asked
  local at site name
  for at in "${!sites[@]}"; do
    site=${sites[at]}
    if [[ -e here/stopped/$site && -v started[supernode-$site] ]]; then
      for name in supernode executor worker; do
        stop "${started[$name-$site]}"
        unset "started[$name-$site]"
      done
      say "$site is stopped; $0 start $site starts it again"
    elif [[ ! -e here/stopped/$site && ! -v started[supernode-$site] ]]; then
      start_worker "$site"
      start_node "$site" "${ports[at]}"
      say "$site is started"
    fi
  done
}

sites=() ports=()
site() { sites+=("$1") ports+=("$2"); }
@sites@

if [[ ${1-} == stop || ${1-} == start ]]; then
  [[ " ${sites[*]} " == *" ${2-} "* ]] || fail "$0 $1 SITE: there is no site '${2-}'; there are ${sites[*]}"
  [[ -e here/running ]] && alive "$(<here/running)" || fail "nothing runs here: start all with $0 first"
  if [[ $1 == stop ]]; then : >"here/stopped/$2"; else rm -f "here/stopped/$2"; fi
  exit
fi

for port in @port@ "${ports[@]}"; do
  is_open "$port" && fail "port $port is in use: end what listens there, or name another in the consortium's file (server.port, or port of a site)"
done
for site in "${sites[@]}"; do
  [[ -e sites/$site/keys/site.key ]] || fail "sites/$site/keys/site.key is not here: this site can run elsewhere only"
done
[[ $# -gt 0 || ! -e $runs/config.yaml ]] || fail "$runs has a run: go on with $0 --run-config resume=true, or remove it"
mkdir -p -m 700 here
rm -rf here/stopped "$logs"
mkdir -p "$logs" here/stopped
echo $$ >here/running
trap 'trap "" INT TERM HUP; stop "${groups[@]}"; rm -f here/running' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

say "starting the SuperLink and ${#sites[@]} sites; their logs are in $logs"
cd server
start superlink @superlink@
cd "$root"
for site in "${sites[@]}"; do start_worker "$site"; done
until_true is_open @port@ @near@
for at in "${!sites[@]}"; do
  site=${sites[at]}
  flwr supernode register "sites/$site/keys/site.pub" befit >"$logs/register-$site.log" 2>&1 ||
    { cat "$logs/register-$site.log" >&2; fail "$site is not registered"; }
  until_true grep -q 'listens at' "$logs/worker-$site.log"
  start_node "$site" "${ports[at]}"
done

start run flwr run app befit --stream "$@"
run=${started[run]}
unset 'started[run]'
tail -n +1 -f --pid="$run" "$logs/run.log" &
shown=$!
while alive "$run"; do
  obey
  check
  sleep 1
done
wait "$shown" || true
grep -q 'the run is finished: ' "$logs/run.log" && exit
[[ ! -e $runs/config.yaml ]] || fail "the run has not finished; $logs has more. To go on: $0 --run-config resume=true"
fail "the run has not begun; $logs has more"
