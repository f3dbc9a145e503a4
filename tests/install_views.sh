#!/bin/sh
# Installs the Debian packages that the tests of the report page and of the live view need, where this is possible.
set -eu
packages="chromium tmux fonts-dejavu-core"
missing=""
for package in $packages; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed here:$missing; the tests of what a person looks at will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086
apt-get -qq install --yes --no-install-recommends $missing >/dev/null
