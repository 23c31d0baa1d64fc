"""torchrun with our processes: torch's own options, agent and rendezvous, and only the start of workers
exchanged.

    python elastic_driver.py forkserver|exec [torchrun's options] script.py args

It isolates what is compared here: whatever differs from torchrun comes from how workers are started.
"""

import os
import sys


def main():
    start_method, *arguments = sys.argv[1:]
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from resilience_sdk.launcher.script import Script
    from resilience_sdk.launcher.starter import WorkerStarter

    args = parse_args(arguments)
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", "conformance"
    config, _, _ = config_from_args(args)
    script = Script.parse(args.training_script, args.training_script_args, module=args.module, no_python=args.no_python)
    starter = WorkerStarter(script, start_method=start_method)
    try:
        with starter.serving_elastic():
            elastic_launch(config, entrypoint=script.target)(*script.args)
    finally:
        starter.close()


if __name__ == "__main__":
    # The folder of this file is no package that a worker may see.
    sys.path[0] = os.environ["PROJECT_ROOT"]
    main()
