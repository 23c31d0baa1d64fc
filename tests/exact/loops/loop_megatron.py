"""A loop of one's own on `megatron.core`, as docs/adapters/megatron.md writes it; Megatron spawns, so it is guarded."""

if __name__ == "__main__":
    import megatron_loop

    megatron_loop.main()
