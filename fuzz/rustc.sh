#!/bin/sh
# Cargo calls this in place of rustc for our own crates (RUSTC_WORKSPACE_WRAPPER): they get libFuzzer's counters, and
# dependencies are those of every other build. Programs that run while building have no fuzzer, and so no counters.
case " $* " in
*" --crate-name build_script_"* | *" --print "* | *"-vV"*) exec "$@" ;;
esac
exec "$@" -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 \
    -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C llvm-args=-sanitizer-coverage-pc-table \
    -C llvm-args=-sanitizer-coverage-trace-compares
