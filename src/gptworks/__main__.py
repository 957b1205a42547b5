from gptworks.cli.main import main

if __name__ == "__main__":  # a worker process imports this file under another name
    raise SystemExit(main())
