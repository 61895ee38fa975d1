"""What the journal stores: entries and what readers say to them."""

from django.db import models


class Entry(models.Model):
    title = models.CharField(max_length=200)
    text = models.TextField()
    written = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-written", "-pk"]
        verbose_name_plural = "entries"

    def __str__(self):
        return self.title


class Comment(models.Model):
    entry = models.ForeignKey(Entry, on_delete=models.CASCADE, related_name="comments")
    name = models.CharField(max_length=80)
    text = models.TextField(max_length=2000)
    written = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["written", "pk"]

    def __str__(self):
        return f"{self.name}: {self.text[:40]}"
