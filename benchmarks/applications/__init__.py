"""Applications that know nothing of this library, each held against itself in one process without it.

    make suite NAME=applications                     # all: environments first, half an hour on 2 cores
    make suite NAME=applications ARGS="trl swift"    # some, without writing the page

Each application has an environment of its own under `benchmarks/out/applications`, with the versions in its
`requirements.txt`, and runs there as its users start it: alone, then on meshes with the variable LORA_PARALLEL. Models
and data are made here, and nothing is loaded from a hub. What has run before, from the same files, is not run again.
"""
