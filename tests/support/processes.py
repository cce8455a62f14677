"""Several processes that compute together, with four virtual devices each."""

import os
import socket
import subprocess
import sys

import jax


def join(address: str, process: str) -> None:
    """Become one of two processes, which find each other at an address."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))


def run_two(script: str, *args: object) -> None:
    """Run a script with the arguments `address, process, *args` in two processes.

    Neither process outlives the call. Pytest shows their output.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:  # a free port
        address = f"127.0.0.1:{server.getsockname()[1]}"
    four = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {four}",  # the last one counts
        "JAX_PLATFORMS": "cpu",
        # For the shared test code and the examples.
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, address, process, *map(str, args)],
            env=environment,
        )
        for process in "01"
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
