#!/bin/sh
# tsan_absl.sh FOLDER: builds libabsl_synchronization.a with ThreadSanitizer from the distribution's own Abseil source.
# Debian's archive has no TSan hooks, which makes every absl::Mutex invisible to it, and so every use of one a false race.
set -eu
out=$1; mkdir -p "$out"; work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
eval "$(apt-config shell parts Dir::Etc::sourceparts/d)"
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
awk 'BEGIN{RS="";ORS="\n\n"} /debian-archive-keyring/ && !/security/' "$parts"debian.sources |
  sed "s/^Suites:.*/Suites: $suite/; s/^Types:.*/Types: deb-src/" > "$work/source.sources"
printf 'Dir::Etc::sourcelist "%s";\nDir::Etc::sourceparts "-";\nDir::State::lists "%s";\nDir::Cache "%s";\nAPT::Sandbox::User "root";\n' \
  "$work/source.sources" "$work/lists" "$work/cache" > "$work/apt.conf"
APT_CONFIG=$work/apt.conf; export APT_CONFIG
apt-get update -qq
cd "$work"
apt-get source -q abseil > /dev/null
cd abseil-*/absl/synchronization
for f in barrier blocking_counter notification mutex internal/create_thread_identity internal/per_thread_sem internal/waiter; do
  clang++-14 -std=c++17 -O2 -g -fsanitize=thread -I../.. -c $f.cc -o "$work/$(basename $f).o"
done
ar rcs "$out/libabsl_synchronization.a" "$work"/*.o
