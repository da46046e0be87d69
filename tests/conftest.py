"""Settings of the whole suite: compiled programs are kept on disk, Hypothesis repeats itself."""

import pathlib

import hypothesis
import jax
import pytest

CACHE = pathlib.Path(__file__).resolve().parents[1] / ".jax_cache"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

hypothesis.settings.register_profile("fpr", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("fpr")


@pytest.fixture(scope="module")
def fast_compile():
    """For modules that compile much and compute little: about half the compile time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
