"""The journal's pages: the latest entries, and one entry with its comments."""

from django.db.models import Count
from django.forms import ModelForm
from django.shortcuts import get_object_or_404, redirect, render

from .models import Comment, Entry


class CommentForm(ModelForm):
    class Meta:
        model = Comment
        fields = ["name", "text"]


def front(request):
    entries = Entry.objects.annotate(said=Count("comments"))[:20]
    return render(request, "front.html", {"entries": entries, "count": Entry.objects.count()})


def entry(request, pk):
    shown = get_object_or_404(Entry, pk=pk)
    form = CommentForm(request.POST or None, instance=Comment(entry=shown))
    if request.method == "POST" and form.is_valid():
        form.save()
        return redirect("entry", pk=pk)
    return render(request, "entry.html", {"entry": shown, "form": form})
