#!/usr/bin/env bash
# kcat: two processes and a correlation id.
set -euo pipefail

# snippet
ask() { # QUESTION: prints the reply's x-event header, a tab, and the reply as it came
  local id="$$-$RANDOM$RANDOM" reply now question=${1//\\/\\\\}
  question=${question//\"/\\\"}
  now=$(date +%s%3N)
  # the reader first, from now on; -u prints each record at once
  exec 3< <(exec kcat -C -q -u -b "$BOOTSTRAP_SERVERS" -t "$REPLIES" -o "s@$now" -f '%h\t%s\n')
  local reader=$!
  printf '{"messages":[{"role":"user","content":"%s"}]}' "$question" |
    kcat -P -b "$BOOTSTRAP_SERVERS" -t "$PROMPTS" -X partitioner=murmur2_random \
      -H "x-correlation-id=$id" -H "x-reply-topic=$REPLIES"
  while read -r -u 3 reply; do
    [[ $reply == *"x-correlation-id=$id"* ]] && break # the first answer; -f has printed the headers before it
  done
  kill "$reader"
  printf '%s\t%s\n' "$(sed -E 's/.*x-event=([a-z]+).*/\1/' <<<"${reply%%$'\t'*}")" "${reply#*$'\t'}"
}
# end snippet

echo ready
while read -r question; do
  ask "$question"
done
