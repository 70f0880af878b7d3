"""Trains a draft head: `python train.py recipe=tiny`, or the same under torchrun.

A shim: the code is `slipstream.scripts.train`. `import train` finds the package, not this file.
"""

if __name__ == "__main__":  # loader workers import this file again
    from slipstream.scripts.train import main

    main()
