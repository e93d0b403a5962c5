#!/bin/sh
# keep_report.sh nvcc ARGUMENTS: runs nvcc, writes its messages of a successful run to OBJECT.report, shows the others.
for argument; do
  [ "$previous" = -o ] && report="$argument.report"
  previous=$argument
done
if "$@" 2> "${report:=/dev/null}"; then
  grep -v '^ptxas info\|bytes stack frame' "$report" >&2 || true
else
  status=$?
  cat "$report" >&2
  exit $status
fi
