from gptworks.cli.main import main

raise SystemExit(main())
