"""`python -m edkm_cli`: the application from a checkout, without installing it."""

from edkm_cli.cli import main

if __name__ == "__main__":
    main()
