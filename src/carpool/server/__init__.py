"""The HTTP front: image, video, chat and job APIs over a fleet of workers. No torch."""
