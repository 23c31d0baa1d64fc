"""A loop on `megatron.core`: `megatron_loop` behind a guard, since its saves spawn a process that imports this."""

if __name__ == "__main__":
    import megatron_loop

    megatron_loop.main()
