#!/bin/sh
# Installs the Debian packages that the tests on a real Slurm need, where this is possible without asking anybody.
set -eu
packages="slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core"
missing=""
for package in $packages; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed here:$missing; the tests on a real Slurm will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# Their services stay off: the tests bring their own daemons up, in a temporary folder.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
# shellcheck disable=SC2086
apt-get -qq install --yes --no-install-recommends $missing >/dev/null
