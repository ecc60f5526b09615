"""The HTTP front: image, video, chat and job APIs over a pool or fleet of workers. No torch."""
