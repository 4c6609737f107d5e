"""``python -m serve_app.commands`` runs the ``shardwright`` command."""

from serve_app.commands.cli import main

if __name__ == "__main__":
    main()
