"""Scripts that prepare data sets and models for the recipes, one script each."""

import os

# transformers imports DeepSpeed when it saves. Without this, DeepSpeed would look for a GPU, and warn.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
