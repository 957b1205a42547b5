"""Files for the scheduler of a cluster: a Slurm script, Kubernetes manifests, a SkyPilot task."""
