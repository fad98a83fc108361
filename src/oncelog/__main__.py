"""Run the `oncelog` command with `python -m oncelog`."""

from oncelog_command import main

if __name__ == "__main__":
    main()
