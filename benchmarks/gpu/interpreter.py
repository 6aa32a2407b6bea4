"""Runs GPU kernels in JAX's interpreter: with a thread for each of theirs, and without compiling them again and
again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

_NUM_THREADS = 8  # a block of the widest kernel has five, and a warpgroup that waits for another keeps its own


def have_threads() -> None:
    """Call before anything asks JAX for its devices. A kernel's threads run in XLA's pool, which has one for each core
    or virtual device, whichever are more: on two cores three warpgroups would wait for each other for ever."""
    if jax.config.values["jax_num_cpu_devices"] < _NUM_THREADS:
        jax.config.update("jax_num_cpu_devices", _NUM_THREADS)


def make_fast() -> None:
    """From here on a kernel's threads are compiled once in this process, and what it reads and writes stays NumPy's.
    JAX 0.10 compiles threads for every thread of every block: it creates the function that it compiles each time, so
    that no cache finds it. (In 0.11 that function is at module level, as `_run` is here.) And each access to a buffer
    puts a dozen integers on a device and takes them off again, as arrays of JAX's."""
    if jax.__version_info__ < (0, 11):
        thread_map._run_jaxpr = _run_jaxpr
        vars(gpu_callbacks)["jnp"] = np
        callback.io_callback_impl = _call_back


def _run(jaxpr: Any, consts: Any, *args: Any) -> None:
    jax.core.eval_jaxpr(jaxpr, consts, *args)


def _run_jaxpr(jaxpr: Any, consts: Any, *args: Any) -> None:
    jax.jit(_run, static_argnums=0).trace(jaxpr, consts, *args).lower().compile()(consts, *args)


def _call_back(*args: Any, callback: Any, **_: Any) -> Any:
    return [np.asarray(result) for result in callback(*map(np.asarray, args))]
