"""Other libraries that train LoRA on a mesh, each as its own documentation says, against one process of plain PEFT.

`jobs` says what is computed and computes it in one process; there is one module a library, whose `train` runs on every
rank; `launch` starts the ranks of a cell; `page` writes docs/results/comparison.md.
"""
