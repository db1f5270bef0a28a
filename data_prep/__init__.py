"""One script per data set or model, each writing what the recipes name."""

import os

# transformers imports DeepSpeed when it saves; without a word from us that would go looking for a GPU, and warn.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
