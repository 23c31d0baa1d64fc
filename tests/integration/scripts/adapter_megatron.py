CONTRACT = {"module": "megatron.core", "package": "megatron-core==0.16.1"}
"""The contract's training with megatron-core: a guard around `megatron_training`, and why.

Megatron's checkpoints spawn a process, which imports the script again: it must not find anything there.
"""

if __name__ == "__main__":
    import megatron_training

    megatron_training.main()
