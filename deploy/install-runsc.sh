#!/bin/sh
# Installs gVisor's `runsc` for envd's gvisor backend, from Debian's signed packages, without changing the system's packages or sources.
#
#   deploy/install-runsc.sh [DIRECTORY]     default: /usr/local/bin as root, else ~/.local/bin
#
# Where the machine's release has one that is too old (Debian 12), it is taken from a newer release (SUITE, default trixie) of the mirror that apt
# uses already. The program is one static file and needs nothing else of that release.
set -eu

fail() {
    echo "install-runsc: $1" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "this needs apt: on another system install runsc as gvisor.dev says, and have it on PATH"
if [ "$(id -u)" = 0 ]; then default=/usr/local/bin; else default=$HOME/.local/bin; fi
target=$(realpath -m "${1:-$default}")
suite=${SUITE:-trixie}
oldest='0.0~20240729' # its checkpoints are restored into other sandboxes as envd/backends/gvisor/backend.py does
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p lists/partial cache/archives/partial

known() {
    version=$(apt-cache "$@" policy runsc 2>/dev/null | sed -n 's/^ *Candidate: //p')
    [ "$version" != "(none)" ] && dpkg --compare-versions "$version" ge "$oldest"
}

as_self=
if [ "$(id -u)" = 0 ]; then as_self='-o APT::Sandbox::User=root'; fi # the user _apt can't write here
if known; then
    # shellcheck disable=SC2086
    apt-get -q $as_self download runsc || fail "apt can't download runsc: run apt-get update first"
else
    apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' >targets
    # The archive itself, not its security updates, which have no runsc.
    mirror=$(sed -n 's/^Debian //p' targets | grep -v security | head -n 1)
    [ -n "$mirror" ] || fail "no Debian mirror among apt's sources (apt-get update, first): install runsc as gvisor.dev says"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -r "$keyring" ] || fail "$keyring is missing: install debian-archive-keyring"
    printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$mirror" "$suite" >sources.list
    # shellcheck disable=SC2086
    set -- -q $as_self -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache"
    apt-get "$@" update || fail "$mirror does not serve $suite"
    known "$@" || fail "$suite has no runsc from $oldest on for $(dpkg --print-architecture)"
    apt-get "$@" download runsc || fail "runsc can't be downloaded"
fi
dpkg -x runsc_*.deb unpacked
unpacked/usr/bin/runsc --version >/dev/null || fail "the runsc that was downloaded does not run here"
mkdir -p "$target"
# Under its name at once and whole: a server may be starting it.
install -m 755 unpacked/usr/bin/runsc "$target/.runsc.$$"
mv -f "$target/.runsc.$$" "$target/runsc"
echo "$("$target/runsc" --version | head -n 1) installed as $target/runsc"
