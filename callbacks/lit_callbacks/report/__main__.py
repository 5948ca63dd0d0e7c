"""`python -m lit_callbacks.report`: one HTML page about one or several runs."""

from lit_callbacks.report import main

if __name__ == "__main__":
    main()
