"""Starting the processes of a run: on one machine or several, their logs, their failures, their process group."""
