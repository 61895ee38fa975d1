"""Entries and comments in Django's admin."""

from django.contrib import admin

from .models import Comment, Entry


class CommentInline(admin.TabularInline):
    model = Comment
    extra = 0


@admin.register(Entry)
class EntryAdmin(admin.ModelAdmin):
    list_display = ["title", "written"]
    search_fields = ["title", "text"]
    inlines = [CommentInline]
