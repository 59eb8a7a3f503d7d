#!/bin/sh
# shell.sh - shellcheck over every script of the tree.
set -eu
cd "$(dirname "$0")/../.."
command -v shellcheck >/dev/null || { echo "  skipped: shellcheck is not installed"; exit 77; }
grep -rlE '^#!(/bin/sh|/usr/bin/env bash)' .ci cluster tests --include='*' | xargs shellcheck
