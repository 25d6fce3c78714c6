#!/usr/bin/env bash
# clone.sh DIR OWNER/NAME@COMMIT...: check sources out below DIR, from $TRAINER_SOURCES (a URL or a directory).
set -euo pipefail
for source in "${@:2}"; do
	name=${source%@*} commit=${source#*@}
	git clone --quiet --no-checkout "$TRAINER_SOURCES/$name" "$1/${name#*/}"
	git -C "$1/${name#*/}" checkout --quiet "$commit"
done
