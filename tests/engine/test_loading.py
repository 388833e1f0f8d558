"""Which checkpoints are the same one."""

from pathlib import Path

from engine.loading import checkpoint_digest


def make(directory: Path, *, config: str = "{}", name: str = "model.safetensors", weights: bytes) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text(directory.name)
    (directory / name).write_bytes(weights)
    return checkpoint_digest(directory)


def test_a_change_anywhere_in_a_checkpoint_makes_it_another_one(tmp_path: Path) -> None:
    """Cached KV of a model is never read by a fine-tuned one of the same sizes; a copy is the same model."""
    weights = bytes(4 << 20)
    tuned = bytearray(weights)
    tuned[3_000_000:3_100_000] = b"x" * 100_000
    digests = {
        make(tmp_path / "base", weights=weights),
        make(tmp_path / "tuned", weights=bytes(tuned)),
        make(tmp_path / "longer", weights=weights + b"x"),
        make(tmp_path / "named", weights=weights, name="other.safetensors"),
        make(tmp_path / "scaled", weights=weights, config='{"rope_theta": 1}'),
        checkpoint_digest(tmp_path / "base" / "model.safetensors"),
    }
    assert len(digests) == 6
    assert make(tmp_path / "copy", weights=weights) in digests
