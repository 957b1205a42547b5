"""Paddle's dataset files, as its hybrid-parallel document uses them. Rows of the conformance list: S3-06."""

from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import registry
from gptworks.data.store import Store


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_s3_06_train_data_json_ids_npz_is_read(save, dtype: type, tmp_path: Path) -> None:
    """Saved as the tool of that time did: both arrays in the type of the vocabulary."""
    ids = np.arange(1000) % 977
    save(tmp_path / "train.data.json_ids.npz", ids=ids.astype(dtype), lens=np.array([600, 0, 400], dtype))
    for name in ("train.data.json_ids.npz", "train.data.json"):
        store = Store(tmp_path / name)
        assert store.tokens.dtype == dtype and store.tokens[:].tolist() == ids.tolist()
        assert store.document_starts.tolist() == [0, 600, 600, 1000]
    (only,) = registry.locate_all(tmp_path)
    assert only.format.NAME == "paddle-npz"
