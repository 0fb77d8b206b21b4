"""Programs for Ray that call ``init`` themselves: with the import changed, and as they are."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Driver = Callable[..., subprocess.CompletedProcess[str]]


def test_init_takes_rays_keywords_and_is_a_context(driver: Driver) -> None:
    done = driver("""
        import logging, warnings
        warnings.simplefilter("error")
        import stoker.ray as ray

        @ray.remote
        def variable():
            import os
            return os.environ["MODE"]

        with ray.init(
            num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, configure_logging=True,
            object_store_memory=200 * 2**20, namespace="mine", log_to_driver=False,
            runtime_env={"env_vars": {"MODE": "fast"}},
        ) as context:
            print(context.address_info["node_ip_address"], context["gcs_address"] == context.dashboard_url)
            print(ray.get(variable.remote()), ray.get_runtime_context().namespace)
            print(ray.init(ignore_reinit_error=True).dashboard_url == context.dashboard_url)
            try:
                ray.init()
            except RuntimeError as error:
                print("twice")
        print(ray.is_initialized())
    """)
    assert done.stdout.split("\n") == ["127.0.0.1 True", "fast mine", "True", "twice", "False", ""]
    assert done.returncode == 0, done.stderr


def test_what_has_no_effect_is_said_once_and_what_is_unknown_is_an_error(driver: Driver) -> None:
    done = driver("""
        import warnings
        import stoker.ray as ray
        from stoker.exceptions import UnknownOptionError

        try:
            ray.init(num_cpu=2)
        except UnknownOptionError as error:
            print(error)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with ray.init(num_cpus=1, _temp_dir="/nowhere"):
                    pass
        print([str(one.message).split(" has")[0] for one in caught if "_temp_dir" in str(one.message)])
    """)
    assert "did you mean 'num_cpus'" in done.stdout
    assert "['init(_temp_dir=...)']" in done.stdout, done.stderr


def test_a_program_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(
        "import ray\n\n@ray.remote\ndef name():\n    import ray.util\n    return ray.__name__\n"
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import ray\n"
        "from ray.util.queue import Queue\n"
        "import ray.exceptions, helper\n"
        "try:\n    from ray import tune\nexcept ImportError as error:\n    print(error)\n"
        "try:\n    import ray.serve\nexcept ImportError as error:\n    print(type(error).__name__)\n"
        "ray.init(num_cpus=1)\n"
        "print(ray.get(helper.name.remote()), ray.util.placement_group.__name__)\n"
    )
    command = [sys.executable, "-m", "stoker.ray", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "ray.tune is not in Stoker" in done.stdout
    assert done.stdout.endswith("NotInStokerError\nstoker.ray placement_group\n")


def test_local_mode_runs_all_in_the_driver(driver: Driver) -> None:
    done = driver("""
        import builtins, os
        import stoker.ray as ray

        ray.init(local_mode=True, num_cpus=1)

        @ray.remote
        def pid(_value=None):
            return os.getpid()

        @ray.remote(num_returns=2)
        def two():
            return 1, 2

        @ray.remote
        def fail():
            raise ValueError("no")

        @ray.remote
        def numbers():
            yield 1
            yield ray.get(pid.remote()) == os.getpid()
            raise KeyError("end")

        @ray.remote
        class Counter:
            def __init__(self, value):
                self.value = value

            def inc(self):
                self.value += 1
                return self.value

            async def later(self):
                return ray.get_runtime_context().get_actor_id()

            def leave(self):
                ray.actor.exit_actor()

        def kind_of(ref):
            try:
                return ray.get(ref)
            except Exception as error:
                known = vars(builtins).values()
                return [base.__name__ for base in type(error).__mro__ if base in known][0]

        assert ray.get(pid.remote(ray.put(1))) == os.getpid()
        print(ray.get(two.remote()), kind_of(fail.remote()), kind_of(pid.remote(fail.remote())))
        print([kind_of(ref) for ref in numbers.remote()])
        counter = Counter.options(name="c").remote(1)
        print(ray.get([counter.inc.remote(), ray.get_actor("c").inc.remote()]))
        print(ray.get(counter.later.remote()) == counter.actor_id, ray.wait([counter.inc.remote()])[1])
        counter.leave.remote()
        try:
            ray.get(counter.inc.remote())
        except ray.exceptions.RayActorError as error:
            print("ended itself" in str(error))
        other = Counter.remote(1)
        ray.kill(other)
        print(kind_of(other.inc.remote()))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [
        "[1, 2] ValueError ValueError",
        "[1, True, 'KeyError']",
        "[2, 3]",
        "True []",
        "True",
        "ConnectionError",
        "",
    ]


def test_the_client_of_jobs(driver: Driver) -> None:
    done = driver("""
        import sys, time
        import stoker.ray as ray
        from stoker.ray.job_submission import JobStatus, JobSubmissionClient

        with ray.init(num_cpus=2, log_to_driver=False) as context:
            client = JobSubmissionClient(context.address_info["address"], token=context.info.token)
            job_id = client.submit_job(
                entrypoint=f"{sys.executable} -c 'print(6 * 7)'", submission_id="mine",
                runtime_env={"env_vars": {"A": "1"}}, metadata={"who": "me"},
            )
            while not client.get_job_status(job_id).is_terminal():
                time.sleep(0.1)
            info = client.get_job_info(job_id)
            print(job_id, info.status == JobStatus.SUCCEEDED, info.metadata, info.driver_exit_code)
            print(client.get_job_logs(job_id).strip())
            print(len(client.list_jobs()), client.stop_job(job_id))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [
        "mine True {'who': 'me'} 0",
        "42",
        "2 False",
        "",
    ]


def test_processes_that_a_program_spawns_import_ray_as_well(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "import ray\n\n"
        "@ray.remote\ndef twice(value):\n    return 2 * value\n\n"
        "def name(value):\n    return ray.__name__, value\n\n"
        "if __name__ == '__main__':\n"
        "    ray.init(num_cpus=1)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(*pool.map(name, [ray.get(twice.remote(2))]))\n"
        "    ray._private.internal_api.free(ray.put(1))\n"
    )
    command = [sys.executable, "-m", "stoker.ray", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "('stoker.ray', 4)\n", done.stderr
    assert done.returncode == 0, done.stderr


def test_after_shutdown_the_next_call_starts_another_cluster(driver: Driver) -> None:
    done = driver("""
        import stoker.ray as ray

        ray.init(num_cpus=1)
        before = ray.get_runtime_context().get_job_id()
        ray.shutdown()
        print(ray.is_initialized())
        print(ray.get(ray.remote(lambda: 5).remote()), ray.get_runtime_context().get_job_id() == before)
        ray.shutdown()
        for wrong in (123, ""):
            try:
                ray.init(namespace=wrong)
            except (TypeError, ValueError) as error:
                print(isinstance(error, TypeError))
        print(ray.is_initialized())
    """)
    assert done.stdout.split() == ["False", "5", "False", "True", "False", "False"], done.stderr
    assert done.returncode == 0, done.stderr
