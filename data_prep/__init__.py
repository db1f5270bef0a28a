"""Scripts that prepare data sets and models for the recipes, one script each."""

import os
import sys

# transformers imports DeepSpeed when it saves. Without this, DeepSpeed would look for a GPU, and warn. As a program
# only (Python's name until it has found the script): a process that imports a script may train on a GPU.
if sys.argv[0] == "-m":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
