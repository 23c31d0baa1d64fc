"""The example of Megatron on CPU: it asks for GPUs, so what stands in for them is put in place before it runs."""

if __name__ == "__main__":
    import logging
    import runpy
    import warnings
    from pathlib import Path

    import cpu_megatron
    import torch

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    cpu_megatron.install()
    torch.cuda.set_device = lambda *_: None
    torch.set_num_threads(1)
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "megatron_train.py"), run_name="__main__")
