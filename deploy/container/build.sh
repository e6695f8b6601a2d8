#!/bin/sh
# build.sh BIN_DIR IMAGE: the image of programs that are built already, without any registry: the last stage of the
# Dockerfile over a root made of this machine's libraries (Debian 12, as the programs were built against). Needs buildah.
set -eu
[ $# = 2 ] || { echo "usage: build.sh BIN_DIR IMAGE" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
context=$(mktemp -d); trap 'rm -rf "$context"' EXIT
"$here/image_root.sh" "$1" "$context/image"
sed -n '/^FROM scratch$/,$p' "$here/Dockerfile" | sed 's/^COPY --from=build /COPY /' > "$context/Dockerfile"
buildah bud --quiet --network none --timestamp "${SOURCE_DATE_EPOCH:-0}" --tag "$2" --file "$context/Dockerfile" "$context"
