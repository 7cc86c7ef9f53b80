#!/bin/sh
# HOROVOD_CMAKE for the Horovod build: adds arguments when it configures, and nothing when it builds.
for argument in "$@"; do
    if [ "$argument" = --build ]; then
        exec "$HVD_ADAPTIVE_CMAKE" "$@"
    fi
done
exec "$HVD_ADAPTIVE_CMAKE" "$@" -DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
    "-DCMAKE_PROJECT_horovod_INCLUDE=$HVD_ADAPTIVE_CMAKE_INCLUDE" "-DMPI_CXX_COMPILER=$HVD_ADAPTIVE_MPICXX"
