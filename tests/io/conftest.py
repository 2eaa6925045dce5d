"""Makes the models beside these tests importable (`from models import ...`), and writes tensors."""

import sys
from pathlib import Path

import pytest
import safetensors.numpy

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def saved(tmp_path):
    """Writes tensors to a file; returns its path."""

    def save(tensors, name="x.safetensors"):
        safetensors.numpy.save_file(tensors, tmp_path / name)
        return tmp_path / name

    return save
