"""Addresses of the journal's pages and of the admin."""

from django.contrib import admin
from django.urls import path

from . import views

urlpatterns = [
    path("", views.front, name="front"),
    path("entry/<int:pk>/", views.entry, name="entry"),
    path("admin/", admin.site.urls),
]
