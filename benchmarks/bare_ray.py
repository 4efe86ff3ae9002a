"""Ray's own start: two actors that answer, and nothing else."""

import logging

import ray


class Worker:
    """Answers."""

    @ray.method
    def answer(self) -> bool:
        """Say that this process is there."""
        return True


def main() -> None:
    """Start Ray, wait for two actors, say so."""
    ray.init(num_cpus=2, logging_level=logging.ERROR, log_to_driver=False)
    actor = ray.remote(num_cpus=1)(Worker)
    workers = [actor.remote(), actor.remote()]
    ray.get([worker.answer.remote() for worker in workers])
    print("ready", flush=True)


if __name__ == "__main__":
    main()
