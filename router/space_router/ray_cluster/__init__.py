"""Router and workers on a Ray cluster, by Ray Serve: `serve run space_router.ray_cluster.app:app`.

`app.py` alone needs Ray (`pip install 'spaceserve[ray]'`).
"""
