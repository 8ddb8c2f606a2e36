"""What needs an NVIDIA GPU. Where there is none all of it is skipped, here, so that it is said once."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no NVIDIA GPU; `make test-gpu` where there is one", allow_module_level=True)
