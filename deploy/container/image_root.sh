#!/bin/sh
# image_root.sh BIN_DIR ROOT: fills the folder ROOT with everything the image holds: the three programs, the shared
# libraries that the dynamic loader gives them here, accounts, and the list of Debian packages the libraries come from.
set -eu
bin=$1 root=$2
[ ! -e "$root" ] || { echo "image_root.sh: $root exists; it must be a new folder" >&2; exit 2; }
mkdir -p "$root/usr/bin" "$root/etc" "$root/usr/share/millrace" "$root/usr/lib" "$root/usr/lib64" "$root/tmp" "$root/proc" \
  "$root/sys" "$root/dev" "$root/model"
ln -s usr/lib "$root/lib"; ln -s usr/lib64 "$root/lib64"

libraries=
for program in millrace millrace-router millrace-worker; do
  strip -o "$root/usr/bin/$program" "$bin/$program"
  found=$(ldd "$bin/$program")
  case $found in *"not found"*) echo "image_root.sh: $program: $found" >&2; exit 1 ;; esac
  libraries="$libraries $(echo "$found" | grep -o '/[^ ]*')"
done
: > "$root/usr/share/millrace/packages"
for library in $(printf '%s\n' $libraries | sort -u); do
  path=$(realpath "$(dirname "$library")")/$(basename "$library")
  install -D -m 755 "$(realpath "$path")" "$root$path"
  package=$(dpkg-query -S "$path" 2>/dev/null || dpkg-query -S "${path#/usr}" 2>/dev/null || dpkg-query -S "$(realpath "$path")")
  dpkg-query -W -f='${Package} ${Version} ${Architecture}\n' "${package%%: /*}" >> "$root/usr/share/millrace/packages"
done
sort -u -o "$root/usr/share/millrace/packages" "$root/usr/share/millrace/packages"

echo "millrace:x:10001:10001:millrace:/:/nonexistent" > "$root/etc/passwd"
echo "millrace:x:10001:" > "$root/etc/group"
echo "hosts: files dns" > "$root/etc/nsswitch.conf"
chmod 1777 "$root/tmp"
find "$root" -exec touch -h -d "@${SOURCE_DATE_EPOCH:-0}" {} +
