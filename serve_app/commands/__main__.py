"""``python -m serve_app`` is the ``shardwright`` command."""

from serve_app.commands.cli import main

if __name__ == "__main__":
    main()
