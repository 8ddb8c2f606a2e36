"""Tests that need an NVIDIA GPU. Without one this package is skipped as a whole."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU; `make test-gpu` where there is one", allow_module_level=True)
